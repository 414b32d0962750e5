"""Changes of level while a run goes on, and their causes.

In: step times and sample tables. Out: drift events, each with a cause where one is found.
"""
