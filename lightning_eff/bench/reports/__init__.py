"""Turn a bench's runs into intervals, verdicts, tables, figures and pages."""
