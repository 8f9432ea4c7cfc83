"""The live dashboard: what its page is told (`data`), the past that the charts show (`recorder`), and its files."""
