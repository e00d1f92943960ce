"""`thermocline serve`: limits, the socket, who may reach the application, and the application."""
