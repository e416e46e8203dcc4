"""Judge: what rows mean. Loss verdict, findings, differences, fleets, targets; no torch."""
