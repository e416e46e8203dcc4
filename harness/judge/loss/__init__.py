"""Loss: the one judge of loss curves. Evidence of runs made anywhere -> rules as functions -> one verdict. Imports no torch."""
