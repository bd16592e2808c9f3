-- Run by Postgres when its volume is new; POSTGRES_DB makes Prefect's database.
CREATE DATABASE mlflow;
