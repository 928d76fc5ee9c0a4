// Moves fragments between the paged KV cache and staging memory, inside the device's memory.
//
// A fragment is contiguous on both sides. Fragments are cut into parts of PART_BYTES, and a warp
// copies a part at a time, four vectors of each thread in flight. A warp takes consecutive parts and
// reads the fragments of 32 of them in one go: the list lies in host memory, so that no copy engine
// is needed to bring it, and one read over the bus must serve many parts.
//
// A block is one warp of 32 registers a thread, without shared memory: so it finds room on a
// multiprocessor that a large matrix product fills but for the last warp. A larger block waits until
// that kernel ends, a millisecond and more.
//
// fragments.ptx is made from this file by scripts/build_ptx.py; the driver compiles that for the
// device it finds (sm_75 and later).

struct Fragment {
    unsigned long long device;  // address in the KV cache
    unsigned int staging;       // bytes from the piece's start in staging memory
    unsigned int bytes;
};

constexpr unsigned int PART_BYTES = 4096;
constexpr unsigned int WARP = 32;

template <typename Word>
__device__ __forceinline__ void copy_words(const char* from, char* to, unsigned int bytes,
                                           unsigned int lane) {
    const Word* source = reinterpret_cast<const Word*>(from) + lane;
    Word* target = reinterpret_cast<Word*>(to) + lane;
    int words = static_cast<int>(bytes / sizeof(Word)) - static_cast<int>(lane);
#pragma unroll 1
    for (; words > static_cast<int>(3 * WARP); words -= 4 * WARP) {
        Word held[4];
#pragma unroll
        for (int k = 0; k < 4; k++) held[k] = __ldcs(source + k * WARP);
#pragma unroll
        for (int k = 0; k < 4; k++) __stcs(target + k * WARP, held[k]);
        source += 4 * WARP;
        target += 4 * WARP;
    }
#pragma unroll 1
    for (; words > 0; words -= WARP) {
        __stcs(target, __ldcs(source));
        source += WARP;
        target += WARP;
    }
}

// count: fragments. parts: parts of the longest fragment. store: 1 from the KV cache to staging, 0
// back. share: parts for each warp to take, one after the other.
extern "C" __global__ void __maxnreg__(32)
kvoffload_copy_fragments(const uint4* fragments, unsigned int count, unsigned int parts,
                         unsigned int share, char* staging, unsigned int store) {
    const unsigned int lane = threadIdx.x;
    unsigned int first = blockIdx.x * share;
    const unsigned int stop = min(first + share, count * parts);
#pragma unroll 1
    for (; first < stop; first += WARP) {
        const unsigned int mine = first + lane;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (mine < stop) packed = fragments[mine / parts];
        const unsigned int here = min(WARP, stop - first);
#pragma unroll 1
        for (unsigned int i = 0; i < here; i++) {
            const unsigned int begin = ((first + i) % parts) * PART_BYTES;
            const unsigned int length = __shfl_sync(0xffffffffu, packed.w, i);
            const unsigned int low = __shfl_sync(0xffffffffu, packed.x, i);
            const unsigned int high = __shfl_sync(0xffffffffu, packed.y, i);
            const unsigned int at = __shfl_sync(0xffffffffu, packed.z, i);
            if (begin >= length) continue;
            const unsigned int bytes = min(PART_BYTES, length - begin);
            char* const device =
                reinterpret_cast<char*>((static_cast<unsigned long long>(high) << 32) | low) + begin;
            char* const chunk = staging + at + begin;
            const char* const from = store ? device : chunk;
            char* const to = store ? chunk : device;
            const unsigned int bits = static_cast<unsigned int>(
                reinterpret_cast<unsigned long long>(device) |
                reinterpret_cast<unsigned long long>(chunk) | bytes);
            if (bits % 16 == 0) {
                copy_words<uint4>(from, to, bytes, lane);
            } else if (bits % 4 == 0) {
                copy_words<unsigned int>(from, to, bytes, lane);
            } else {
                copy_words<unsigned char>(from, to, bytes, lane);
            }
        }
    }
}
