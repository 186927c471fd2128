"""Weight sync: trained weights into running engines."""
