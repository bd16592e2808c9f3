"""Ray clusters: started when needed, and stopped with all their processes."""
