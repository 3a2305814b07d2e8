"""Tools that check, repair and export a store that is not open. Nothing here serves messages."""
