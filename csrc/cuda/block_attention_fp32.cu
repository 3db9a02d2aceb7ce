#include "cuda/attention_launch.cuh"

namespace dmtp::cuda {

template const char* launch_attention<Fp32Fma, false>(const AttentionLaunch&, void*);

}  // namespace dmtp::cuda
