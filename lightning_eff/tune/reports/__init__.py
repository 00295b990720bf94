"""What a search leaves behind: its report in words and pictures, its recipe and its cost."""
