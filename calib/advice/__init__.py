"""From a step to answers: forecast, plan, decision, transcript."""
