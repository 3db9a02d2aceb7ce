#include "watch.h"

#include <cstdio>

#include "fiber_state.h"

namespace dmtp::host {
namespace {

alignas(16) char handler_stack[1 << 16];

void outside(int, siginfo_t* info, void*) {
  if (current == nullptr) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const char* what = closed_shared(info->si_addr) ? "shared memory of a block that has not begun, or has ended"
                                                  : "an access outside of memory";
  char text[32];
  std::snprintf(text, sizeof text, ", at %p", info->si_addr);
  fail(where(self()) + ": " + what + text);
}

}  // namespace

Watch::Watch() {
  struct sigaction action{};
  action.sa_sigaction = outside;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &stack_before_);
  sigaction(SIGSEGV, &action, &segv_);
  sigaction(SIGBUS, &action, &bus_);
}

Watch::~Watch() {
  sigaction(SIGSEGV, &segv_, nullptr);
  sigaction(SIGBUS, &bus_, nullptr);
  sigaltstack(&stack_before_, nullptr);
}

}  // namespace dmtp::host
