"""What a user may write: signatures, loading, the forms of a reward, and which function a row selects."""
