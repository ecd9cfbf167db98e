"""Options of megatron-core that a configuration passes on by upstream's names: which act, and why the others may not stand."""
