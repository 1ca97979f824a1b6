"""Pictures and tables of timelines: in the terminal, as SVG, HTML and Perfetto traces."""
