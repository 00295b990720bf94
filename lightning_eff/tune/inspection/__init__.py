"""What is found before anything is searched: of the module, of each technique alone, and of an earlier search in the folder."""
