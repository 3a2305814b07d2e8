"""PySpark source and sink. Speaks Flight through raymq.cluster's client side and never imports Ray."""
