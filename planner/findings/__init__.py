"""What is wrong with a step or limits it: rules over plain data. Without torch."""
