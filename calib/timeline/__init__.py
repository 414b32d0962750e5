"""From estimates to a step: schedules, simulation, breakdown, trace."""
