/* Replays launches that were recorded in a file, each stream in a thread; see test_kernel_races.py.
 *
 *   replay RECORDING RESULT
 *
 * The file holds u64 numbers: where the memory was, its size, how many of its words are addresses,
 * and how many streams there are; the memory; where in it those addresses are; and for each stream the
 * number of its launches, and these. The memory as the launches leave it is written to RESULT. */
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "emulate.cpp"

namespace {

struct Launch {
    char kernel[48];
    u64 grid, block;
    u64 job[sizeof(Job) / sizeof(u64)];
};

class File {
  public:
    File(const char *path, const char *mode) : file_(std::fopen(path, mode)) { require(file_); }
    ~File() { std::fclose(file_); }

    void read(void *to, u64 size) { require(std::fread(to, 1, size, file_) == size); }
    void write(const void *from, u64 size) { require(std::fwrite(from, 1, size, file_) == size); }

    u64 number() {
        u64 value;
        read(&value, sizeof value);
        return value;
    }

  private:
    std::FILE *file_;

    static void require(bool good) {
        if (good) return;
        std::perror("replay");
        std::exit(2);
    }
};

/* The memory, at another place than it was. */
class Memory {
  public:
    explicit Memory(u64 began, u64 size)
        : began_(began), size_(size), bytes_(static_cast<char *>(std::aligned_alloc(4096, size))) {}
    ~Memory() { std::free(bytes_); }

    char *bytes() { return bytes_; }
    u64 size() const { return size_; }

    void relocate(u64 &word) const {
        if (word - began_ < size_) word += reinterpret_cast<u64>(bytes_) - began_;
    }

  private:
    u64 began_, size_;
    char *bytes_;
};

void run(const std::vector<Launch> &stream) {
    for (const Launch &launch : stream)
        if (emulate(launch.kernel, launch.grid, launch.block, launch.job) != DONE) std::exit(2);
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) return 2;
    File recording(arguments[1], "rb");
    const u64 began = recording.number(), size = recording.number();
    const u64 addresses = recording.number(), streams = recording.number();
    Memory memory(began, size);
    recording.read(memory.bytes(), size);
    for (u64 k = 0; k < addresses; k++)
        memory.relocate(*reinterpret_cast<u64 *>(memory.bytes() + recording.number()));
    std::vector<std::vector<Launch>> all(streams);
    for (auto &stream : all) {
        stream.resize(recording.number());
        recording.read(stream.data(), stream.size() * sizeof(Launch));
        for (Launch &launch : stream)
            for (u64 &word : launch.job) memory.relocate(word);
    }
    {
        std::vector<std::jthread> threads;
        for (const auto &stream : all) threads.emplace_back([&stream] { run(stream); });
    }
    File(arguments[2], "wb").write(memory.bytes(), size);
    return 0;
}
