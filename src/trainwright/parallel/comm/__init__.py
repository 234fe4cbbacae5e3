"""What ranks send one another: compressed collectives (slot ``comm``) and the recorder of all of them."""
