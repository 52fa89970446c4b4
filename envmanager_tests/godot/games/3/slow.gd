extends "res://troubled.gd"
# Takes 0.4 s to load.


func _ready() -> void:
	OS.delay_msec(400)
