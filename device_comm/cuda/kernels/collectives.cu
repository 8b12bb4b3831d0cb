/* The kernels, with the names of device_comm/cuda/ipc/abi.py. */
#include <norm.cuh>
#include <packets.cuh>
#include <staged.cuh>
#include <transfer.cuh>

KERNEL(ipc_move, Job, MAX_THREADS, 1) { move(job); }

KERNEL(ipc_transfer, Job, MAX_THREADS, 2) { transfer(job); }

KERNEL(ipc_reduce_float32, Job, MAX_THREADS, 1) { reduce<Float32>(job); }
KERNEL(ipc_reduce_float16, Job, MAX_THREADS, 1) { reduce<Float16>(job); }
KERNEL(ipc_reduce_bfloat16, Job, MAX_THREADS, 1) { reduce<BFloat16>(job); }

KERNEL(ipc_all_reduce_float32, Job, MAX_THREADS, 1) { all_reduce<Float32>(job); }
KERNEL(ipc_all_reduce_float16, Job, MAX_THREADS, 1) { all_reduce<Float16>(job); }
KERNEL(ipc_all_reduce_bfloat16, Job, MAX_THREADS, 1) { all_reduce<BFloat16>(job); }

KERNEL(ipc_packets_float32, Job, MAX_THREADS, 1) { all_reduce_packets<Float32>(job); }
KERNEL(ipc_packets_float16, Job, MAX_THREADS, 1) { all_reduce_packets<Float16>(job); }
KERNEL(ipc_packets_bfloat16, Job, MAX_THREADS, 1) { all_reduce_packets<BFloat16>(job); }

KERNEL(ipc_packets_norm_float32, Job, MAX_THREADS, 1) { all_reduce_norm<Float32>(job); }
KERNEL(ipc_packets_norm_float16, Job, MAX_THREADS, 1) { all_reduce_norm<Float16>(job); }
KERNEL(ipc_packets_norm_bfloat16, Job, MAX_THREADS, 1) { all_reduce_norm<BFloat16>(job); }
