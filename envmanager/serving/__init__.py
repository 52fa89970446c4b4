"""A web server that shows a manager at work, on one page, and gives its metrics to Prometheus. It only reads."""
