"""Launch lint: arguments and variables of a launch that waste time or memory, distort what is
measured, or put the run at risk; what to write instead, and what the run's model says of it."""
