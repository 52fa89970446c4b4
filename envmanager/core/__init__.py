"""What every manager does, whoever hosts its workers: who may be asked, waited for, handed out and replaced."""
