#pragma once

#include "capability.h"
#include "dmtp/advance.h"

DMTP_CPU_KERNEL(advance, Advance)
