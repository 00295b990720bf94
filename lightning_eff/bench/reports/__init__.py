"""From a bench's runs to intervals, verdicts, tables, figures and pages."""
