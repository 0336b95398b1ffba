"""Which settings of the levers are worth running, and which one is the best. Pure: runs nothing, knows no device."""
