"""The command line: grammar, commands, doctor, Grafana."""
