#pragma once

#include "capability.h"
#include "dmtp/t1_prep.h"

DMTP_CPU_KERNEL(t1_prep, T1Prep)
