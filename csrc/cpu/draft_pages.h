#pragma once

#include "capability.h"
#include "dmtp/draft_pages.h"

DMTP_CPU_KERNEL(draft_pages, DraftPages)
