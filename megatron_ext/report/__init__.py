"""The report: a table in the terminal and one offline HTML page from run directories. Never torch, never Trackio."""
