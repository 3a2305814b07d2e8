"""The command line: words, what they do, doctor, Grafana."""
