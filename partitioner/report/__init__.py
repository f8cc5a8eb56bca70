"""Write a plan as one HTML file that works without a network, and display plans in notebooks."""
