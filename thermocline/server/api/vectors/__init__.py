"""Routes that read texts and write none: vectors of texts, and how relevant documents are to a query."""
