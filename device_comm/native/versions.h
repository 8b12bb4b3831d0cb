/* Compiler attributes for vector code: one version of a loop for AVX2 machines and one for all
 * others, selected when the library is loaded. */
#ifndef GC_VERSIONS_H
#define GC_VERSIONS_H

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VERSIONED __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VERSIONED
#endif

/* Asserts that no iteration of the next loop depends on another. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#endif
