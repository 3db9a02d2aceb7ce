#pragma once

#include "capability.h"
#include "dmtp/sample.h"

DMTP_CPU_KERNEL(sample_rows, SampleRows)
