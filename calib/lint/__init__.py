"""Launch lint: arguments and variables that waste time or memory, distort measurements, or put the
run at risk; with their replacements and modelled gains."""
