#include "cuda/attention_launch.cuh"

namespace dmtp::cuda {

template const char* launch_attention<Fp16Mma, false>(const AttentionLaunch&, void*);
template const char* launch_attention<Fp16Mma, true>(const AttentionLaunch&, void*);

}  // namespace dmtp::cuda
