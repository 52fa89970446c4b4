extends "res://addons/envmanager/arena.gd"
## A ball is put to the top by a plain write, where the option "where" says; a lift is put there by place_3d() in reset().

var where := ""
var ticks := 0

@onready var ball: RigidBody3D = $"../Ball"
@onready var lift: AnimatableBody3D = $"../Lift"


func reset(_from: RandomNumberGenerator, options: Dictionary) -> void:
	where = options.get("where", "")
	ticks = 0
	_put("reset")
	place_3d(lift, Transform3D(Basis(), Vector3(200, 10, 0)))


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([ball.position.y, lift.position.y])


func act(_continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	_put("act")


func after_tick() -> void:
	ticks += 1
	_put("after_tick")


func _physics_process(_delta: float) -> void:
	_put("_physics_process")
	lift.position.y += 5


func _process(_delta: float) -> void:
	_put("_process")


func _put(here: String) -> void:
	if here == where and ticks <= 2:
		ball.position = Vector3(0, 10, 0)
		ball.linear_velocity = Vector3(0, 60, 0)
