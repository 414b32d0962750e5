"""From samples to estimates: laws, efficiency regressors, collective models, intervals."""
