#pragma once

#include "capability.h"
#include "dmtp/lm_head.h"

DMTP_CPU_KERNEL(lm_head_select, LMHeadSelect)
DMTP_CPU_KERNEL(lm_head_screen, LMHeadScreen)
DMTP_CPU_KERNEL(lm_head_rescore, LMHeadRescore)
