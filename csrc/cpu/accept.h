#pragma once

#include "capability.h"
#include "dmtp/accept.h"

DMTP_CPU_KERNEL(accept_prefix, AcceptPrefix)
DMTP_CPU_KERNEL(accept_sampled, AcceptSampled)
