#include "cuda/attention_launch.cuh"

namespace dmtp::cuda {

template const char* launch_attention<Bf16Mma, true>(const AttentionLaunch&, void*);

}  // namespace dmtp::cuda
