"""Extensions of fp8-harness. Each entry point is a module of its own, so that using one imports only that one."""
