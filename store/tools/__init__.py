"""Tools that check, mend and export a store that is not open. Nothing here serves messages."""
