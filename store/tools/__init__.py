"""What looks at, mends and exports a store that nobody has open. Nothing here serves messages."""
