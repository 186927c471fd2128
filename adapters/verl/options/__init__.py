"""Options of verl as a runtime takes them."""
