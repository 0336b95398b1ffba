"""Records -> tables, pages and pictures. Reads records only: nothing here runs or decides anything."""
