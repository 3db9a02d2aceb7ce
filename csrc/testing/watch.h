#pragma once

#include <signal.h>

namespace dmtp::host {

// Ends the launch where a fiber touches memory that is not there, while it lives.
class Watch {
 public:
  Watch();
  ~Watch();

 private:
  struct sigaction segv_, bus_;
  stack_t stack_before_;
};

}  // namespace dmtp::host
