// Moves fragments between the paged KV cache and a staging chunk, inside the device's memory.
//
// A fragment is contiguous on both sides. Fragments are cut into parts of PART_BYTES, and a warp
// copies a part at a time, all of it in flight at once. A warp takes consecutive parts and reads the
// fragments of 32 of them in one go: the list lies in host memory, so that no copy engine is needed
// to bring it, and one read over the bus must serve many parts.
//
// fragments.ptx is made from this file by scripts/build_ptx.py; the driver compiles that for the
// device it finds (sm_75 and later).

struct Fragment {
    unsigned long long device;  // address in the KV cache
    unsigned int staging;       // bytes from the staging chunk's start
    unsigned int bytes;
};

constexpr unsigned int PART_BYTES = 4096;
constexpr unsigned int WARP = 32;

template <typename Word>
__device__ __forceinline__ void copy_words(const char* from, char* to, unsigned int bytes,
                                           unsigned int lane) {
    const Word* source = reinterpret_cast<const Word*>(from);
    Word* target = reinterpret_cast<Word*>(to);
    const unsigned int words = bytes / sizeof(Word);
    unsigned int i = lane;
    for (; i + 7 * WARP < words; i += 8 * WARP) {
        Word held[8];
#pragma unroll
        for (int k = 0; k < 8; k++) held[k] = __ldcs(source + i + k * WARP);
#pragma unroll
        for (int k = 0; k < 8; k++) __stcs(target + i + k * WARP, held[k]);
    }
    for (; i < words; i += WARP) __stcs(target + i, __ldcs(source + i));
}

// count: fragments. parts: parts of the longest fragment. store: 1 from the KV cache to staging, 0
// back. share: parts for each warp to take, one after the other.
extern "C" __global__ void __launch_bounds__(1024)
kvoffload_copy_fragments(const uint4* fragments, unsigned int count, unsigned int parts,
                         unsigned int share, char* staging, unsigned int store) {
    const unsigned int lane = threadIdx.x % WARP;
    const unsigned int warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const unsigned int all = count * parts;
    unsigned int first = warp * share;
    const unsigned int stop = min(first + share, all);
    for (; first < stop; first += WARP) {
        const unsigned int mine = first + lane;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (mine < stop) packed = fragments[mine / parts];
        const unsigned int here = min(WARP, stop - first);
#pragma unroll 1
        for (unsigned int i = 0; i < here; i++) {
            Fragment fragment;
            const unsigned int low = __shfl_sync(0xffffffffu, packed.x, i);
            const unsigned int high = __shfl_sync(0xffffffffu, packed.y, i);
            fragment.device = (static_cast<unsigned long long>(high) << 32) | low;
            fragment.staging = __shfl_sync(0xffffffffu, packed.z, i);
            fragment.bytes = __shfl_sync(0xffffffffu, packed.w, i);
            const unsigned int begin = ((first + i) % parts) * PART_BYTES;
            if (begin >= fragment.bytes) continue;
            const unsigned int bytes = min(PART_BYTES, fragment.bytes - begin);
            char* const device = reinterpret_cast<char*>(fragment.device) + begin;
            char* const chunk = staging + fragment.staging + begin;
            const char* const from = store ? device : chunk;
            char* const to = store ? chunk : device;
            const unsigned long long bits = reinterpret_cast<unsigned long long>(device) |
                                            reinterpret_cast<unsigned long long>(chunk) | bytes;
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
