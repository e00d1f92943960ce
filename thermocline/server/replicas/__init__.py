"""Several engines behind one address, under Ray Serve: who gets a request, what is said if one is lost."""
