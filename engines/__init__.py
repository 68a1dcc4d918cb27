"""Run one model: runtimes behind two ports, bounded executors, remote twins, residency and the model store."""
